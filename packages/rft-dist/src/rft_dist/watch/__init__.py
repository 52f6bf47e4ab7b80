"""No silent hang: what every rank is doing is known to the others while they wait, and the first failure to all."""
