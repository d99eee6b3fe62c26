"""What every platform shares: requests, machines, job files, the contents of images."""
