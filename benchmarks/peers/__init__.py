"""What the trainers are measured against, each written from its published description; every file is self-contained."""
