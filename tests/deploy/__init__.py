"""Tests of deploy/: its files pass the tools that read them, and agree with each other and the code."""
