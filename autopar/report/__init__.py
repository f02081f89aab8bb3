"""Plans, prices and checks as text for people."""
