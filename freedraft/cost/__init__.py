"""Costs and gains of drafting: decides how much to draft."""
