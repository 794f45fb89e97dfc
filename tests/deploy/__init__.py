"""Tests of the files that others run."""
