"""The JSON settings: read, validated, typed."""
