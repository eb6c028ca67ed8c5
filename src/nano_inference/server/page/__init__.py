"""The page that the server answers `/` with, and `/docs`. What browsers get lies in `files/`."""
