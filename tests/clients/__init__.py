"""Tests of clients/: against a scripted service, no model involved."""
