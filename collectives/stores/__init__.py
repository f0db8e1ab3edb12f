"""Where ranks meet: stores of keys, and their URLs. Knows no group."""
