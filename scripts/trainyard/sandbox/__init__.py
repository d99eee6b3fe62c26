"""What runs beside an image where there is no network: fakes of Google Cloud, and data to train on."""
