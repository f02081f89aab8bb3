"""What the machine is: plain data, no torch.

    Cluster    levels (outermost first, as node x gpu) and the device they are made of
    Level      how the parts of one level are joined: bandwidth, and the protocols that collectives run there
    Device     one accelerator or CPU rank: peak FLOP/s, memory, and what of it can be reached
    Mesh       the devices seen as a grid of MeshAxis; each axis knows which levels it spans
    Places     groups of devices that hold different pipeline stages: the mesh, device and links of each

`Cluster.parse("h100:8x8")` reads a preset of autopar/clusters/*.toml, where every number has its source;
`Cluster.parse("h100:2x8+a100-80:2x8")` joins parts of other devices or other sizes.
"""

from autopar.cluster.mesh import Mesh, MeshAxis, Span
from autopar.cluster.places import Places, orders, pipelines
from autopar.cluster.presets import presets
from autopar.cluster.types import Cluster, Device, Level, Protocol

__all__ = [
    "Cluster",
    "Device",
    "Level",
    "Mesh",
    "MeshAxis",
    "Places",
    "Protocol",
    "Span",
    "orders",
    "pipelines",
    "presets",
]
