"""How functions, arguments and results travel. Knows no other folder of actors/."""
