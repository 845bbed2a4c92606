"""Attention Oracle: may this attention kernel ship?"""

__version__ = "0.1.0"
