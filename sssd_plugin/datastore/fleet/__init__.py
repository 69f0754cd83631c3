"""What replicas on many hosts learn from each other, through a bucket."""
