"""From defaults, files and flags to one settings object that knows where each value came from.

`resolve.resolve` is the entry; `schema` lists what a command takes, `command_line` and `yaml_file`
read what was written, `values` converts it, `rules` checks it as a whole, `errors` says what is wrong.
"""
