"""The package's version, in the one place that needs no import of anything else."""

__version__ = "0.1.0"
