"""Tests of `gateway embed`."""
