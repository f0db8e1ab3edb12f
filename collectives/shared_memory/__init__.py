"""The transport between ranks of one host. Knows the contract, and no group."""
