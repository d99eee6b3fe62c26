"""Model what every platform shares: requests, their options, machines, the contents of images."""
