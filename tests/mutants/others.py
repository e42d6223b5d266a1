"""Defects in the other backends, in own losses, compiled programs and labels."""
