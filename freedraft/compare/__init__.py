"""`freedraft compare`: the same requests to a plain and to a drafting server, and whether they answer alike."""
