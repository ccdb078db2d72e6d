"""Office-Home (Venkateswara et al., "Deep Hashing Network for Unsupervised Domain Adaptation", CVPR 2017)."""

from typing import ClassVar

from datamodules.domain_layout import DomainSource

# fmt: off
#: the release's name of each class's folder, in order
CLASSES = (
    "Alarm_Clock", "Backpack", "Batteries", "Bed", "Bike", "Bottle", "Bucket", "Calculator", "Calendar", "Candles",
    "Chair", "Clipboards", "Computer", "Couch", "Curtains", "Desk_Lamp", "Drill", "Eraser", "Exit_Sign", "Fan",
    "File_Cabinet", "Flipflops", "Flowers", "Folder", "Fork", "Glasses", "Hammer", "Helmet", "Kettle", "Keyboard",
    "Knives", "Lamp_Shade", "Laptop", "Marker", "Monitor", "Mop", "Mouse", "Mug", "Notebook", "Oven", "Pan",
    "Paper_Clip", "Pen", "Pencil", "Postit_Notes", "Printer", "Push_Pin", "Radio", "Refrigerator", "Ruler", "Scissors",
    "Screwdriver", "Shelf", "Sink", "Sneakers", "Soda", "Speaker", "Spoon", "TV", "Table", "Telephone", "ToothBrush",
    "Toys", "Trash_Can", "Webcam",
)
# fmt: on


class OfficeHome(DomainSource):
    """15,588 images of 65 classes in four domains: art, clipart, pictures of products, and photos.

    Read from ``<root>/office_home/{Art,Clipart,Product,Real World}/<class>/`` or from the folder that the release
    unpacks to, ``OfficeHomeDataset_10072016``; Dassl's names of domains in small letters are read too. Each domain is
    split 80/20, stratified by class: there is no published split. :class:`DomainSource` says what the arguments mean.
    """

    title = "Office-Home"
    home = "the release at https://www.hemanthdv.org/officeHomeDataset.html"
    folders = ("office_home", "OfficeHomeDataset_10072016", "OfficeHome", "office_home_dg")
    spellings: ClassVar = {
        "art": ("Art", "art"),
        "clipart": ("Clipart", "clipart"),
        "product": ("Product", "product"),
        "real_world": ("Real World", "Real_World", "RealWorld", "real_world"),
    } | {name.lower().replace("_", " "): (name,) for name in CLASSES}
    sizes = (2427, 4365, 4439, 4357)
    key = "office_home"
    class_names = tuple(name.lower().replace("_", " ") for name in CLASSES)
    domain_names = ("art", "clipart", "product", "real_world")
