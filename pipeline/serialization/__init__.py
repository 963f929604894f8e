"""Files of tensors and arrays, read without executing what is in them. Nothing here knows which file means what."""
