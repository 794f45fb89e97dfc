"""Tests; a test's name says the promise."""
