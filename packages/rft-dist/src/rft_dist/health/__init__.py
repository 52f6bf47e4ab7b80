"""No silent hang: heartbeats tell each rank what the others do, and the first failure reaches all. Imports no room."""
