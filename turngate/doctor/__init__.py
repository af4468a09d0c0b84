"""What `turngate doctor` examines."""
