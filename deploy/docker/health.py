"""The health check of the image. Exit code 0 if the gateway can serve model calls, otherwise 1.

Reads the gateway's URL from its data folder, so it works with every --port. Uses only the standard library.
"""

import json
import sys
from urllib.request import ProxyHandler, build_opener

try:
    with open("/data/gateway.json", "rb") as note:
        url = json.load(note)["url"]
    with build_opener(ProxyHandler({})).open(f"{url}/health", timeout=4) as answer:
        print(answer.read(1000).decode())
except (OSError, ValueError, KeyError) as error:  # OSError includes status 503, which means that no engine responds
    sys.exit(f"not healthy: {error}")
