"""The same faults for Chorusline and for other systems: what each of them loses."""
