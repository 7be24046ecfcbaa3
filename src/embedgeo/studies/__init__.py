"""Studies: what nobody needs to monitor a run or to sweep one.

They use the public face of the package. The command line alone imports them.
"""
