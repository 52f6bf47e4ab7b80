"""Resolution of defaults, files and flags into one settings object that keeps the origin of each value.

`resolve.resolve` is the entry; `schema` lists what a command takes, `command_line` and `yaml_file`
read what was written, `values` converts it, `rules` checks it as a whole, `errors` describes the problems.
"""
