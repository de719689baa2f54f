"""The programs that Ctrl-C is pressed in."""
