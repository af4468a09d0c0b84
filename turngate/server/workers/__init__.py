"""Several worker processes behind one port."""
