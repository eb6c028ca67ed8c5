"""What RL training needs beside the engine: replay and reports."""
