"""IPv4 addresses of the interfaces of the nodes here."""

ADDRESSES = {"eth0": "10.0.0.5", **{f"ens{i}np0": f"10.1.{i}.5" for i in range(8)}}
