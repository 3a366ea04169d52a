"""Settings of every test: nothing reaches out to a hub or phones home."""

import os

# Read when the libraries are imported, so it has to be here, before any test is.
os.environ.update(HF_HUB_OFFLINE="1", DVC_NO_ANALYTICS="1", GX_ANALYTICS_ENABLED="false")
