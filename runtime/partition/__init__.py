"""Which rank owns which elements, as pure functions. Knows no other folder."""
