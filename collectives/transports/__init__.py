"""Gloo, NCCL and their choice. Knows the transport of one host, and no group."""
