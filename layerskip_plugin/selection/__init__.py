"""Selections decide which sublayers to skip while serving: static, SWIFT, KNN-SSD and KnapSpec."""
