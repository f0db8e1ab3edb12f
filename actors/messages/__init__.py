"""What processes tell each other, as frozen records. Knows no actor that sends them."""
