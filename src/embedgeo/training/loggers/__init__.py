"""Charts, text and pictures for loggers, beside scalars; one function ``…adapter`` a logger."""
