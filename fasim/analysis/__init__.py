"""What a run means: bounds, differences between runs, losses. Data in, data out; nothing here simulates."""
