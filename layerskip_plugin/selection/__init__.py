"""Which sublayers to skip: static, SWIFT, Self-SD, KNN-SSD and KnapSpec."""
