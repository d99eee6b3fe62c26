"""Valid and invalid job files with the source of each: what upstream's tests, examples and schemas say of them."""
