"""Settings of a run, one module a topic. Imports no torch and no other room.

Groups that several commands share are base classes, so that a command offers only settings that
have an effect in it. Metadata keys of a field, read by the command line: `minimum`, `maximum`
(inclusive), `above` (exclusive), `bare` (the value of the flag given without one).
"""
