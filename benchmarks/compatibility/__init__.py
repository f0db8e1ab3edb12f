"""What torch's own tests, and a stock FSDP2, do on our groups."""
