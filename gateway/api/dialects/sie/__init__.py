"""SIE's API."""
