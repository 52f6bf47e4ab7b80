"""Settings from files, flags and keyword arguments: names, values, origins, contradictions, and every problem at once.

No torch is imported, nothing is printed. Words of a command line are divided by `rft_cli`.
"""
