"""Other engines to compare with: their installation, and one small worker program for each."""
