"""Tests, one folder per package folder they test."""
