"""SUN397 (Xiao et al., "SUN Database: Large-scale Scene Recognition from Abbey to Zoo", CVPR 2010)."""

from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from datamodules.coop_layout import DownloadableCoOpSource, read_lines


class SUN397(DownloadableCoOpSource):
    """397 scenes, 15,880 train and 19,850 test images: those of the first of the official partitions.

    A name has the kind of the scene first, as in CoOp: ``a/apse/indoor`` is "indoor apse".
    """

    title = "SUN397"
    home = "https://vision.princeton.edu/projects/2010/SUN/ (with its Partitions.zip for a seeded split)"
    folders = ("sun397", ".")
    images = "SUN397"
    layout = "SUN397/<letter>/<class>/*.jpg"
    split_name = "SUN397"
    sizes = (15880, 19850)
    # fmt: off
    class_names = (
        "abbey", "airplane cabin", "airport terminal", "alley", "amphitheater", "amusement arcade", "amusement park",
        "anechoic chamber", "outdoor apartment building", "indoor apse", "aquarium", "aqueduct", "arch", "archive",
        "outdoor arrival gate", "art gallery", "art school", "art studio", "assembly line", "outdoor athletic field",
        "public atrium", "attic", "auditorium", "auto factory", "badlands", "indoor badminton court", "baggage claim",
        "shop bakery", "exterior balcony", "interior balcony", "ball pit", "ballroom", "bamboo forest",
        "banquet hall", "bar", "barn", "barndoor", "baseball field", "basement", "basilica",
        "outdoor basketball court", "bathroom", "batters box", "bayou", "indoor bazaar", "outdoor bazaar", "beach",
        "beauty salon", "bedroom", "berth", "biology laboratory", "indoor bistro", "boardwalk", "boat deck",
        "boathouse", "bookstore", "indoor booth", "botanical garden", "indoor bow window", "outdoor bow window",
        "bowling alley", "boxing ring", "indoor brewery", "bridge", "building facade", "bullring", "burial chamber",
        "bus interior", "butchers shop", "butte", "outdoor cabin", "cafeteria", "campsite", "campus", "natural canal",
        "urban canal", "candy store", "canyon", "backseat car interior", "frontseat car interior", "carrousel",
        "indoor casino", "castle", "catacomb", "indoor cathedral", "outdoor cathedral", "indoor cavern", "cemetery",
        "chalet", "cheese factory", "chemistry lab", "indoor chicken coop", "outdoor chicken coop", "childs room",
        "indoor church", "outdoor church", "classroom", "clean room", "cliff", "indoor cloister", "closet",
        "clothing store", "coast", "cockpit", "coffee shop", "computer room", "conference center", "conference room",
        "construction site", "control room", "outdoor control tower", "corn field", "corral", "corridor",
        "cottage garden", "courthouse", "courtroom", "courtyard", "exterior covered bridge", "creek", "crevasse",
        "crosswalk", "office cubicle", "dam", "delicatessen", "dentists office", "sand desert", "vegetation desert",
        "indoor diner", "outdoor diner", "home dinette", "vehicle dinette", "dining car", "dining room",
        "discotheque", "dock", "outdoor doorway", "dorm room", "driveway", "outdoor driving range", "drugstore",
        "electrical substation", "door elevator", "interior elevator", "elevator shaft", "engine room",
        "indoor escalator", "excavation", "indoor factory", "fairway", "fastfood restaurant", "cultivated field",
        "wild field", "fire escape", "fire station", "indoor firing range", "fishpond", "indoor florist shop",
        "food court", "broadleaf forest", "needleleaf forest", "forest path", "forest road", "formal garden",
        "fountain", "galley", "game room", "indoor garage", "garbage dump", "gas station", "exterior gazebo",
        "indoor general store", "outdoor general store", "gift shop", "golf course", "indoor greenhouse",
        "outdoor greenhouse", "indoor gymnasium", "indoor hangar", "outdoor hangar", "harbor", "hayfield", "heliport",
        "herb garden", "highway", "hill", "home office", "hospital", "hospital room", "hot spring", "outdoor hot tub",
        "outdoor hotel", "hotel room", "house", "outdoor hunting lodge", "ice cream parlor", "ice floe", "ice shelf",
        "indoor ice skating rink", "outdoor ice skating rink", "iceberg", "igloo", "industrial area", "outdoor inn",
        "islet", "indoor jacuzzi", "indoor jail", "jail cell", "jewelry shop", "kasbah", "indoor kennel",
        "outdoor kennel", "kindergarden classroom", "kitchen", "kitchenette", "outdoor labyrinth", "natural lake",
        "landfill", "landing deck", "laundromat", "lecture room", "indoor library", "outdoor library",
        "outdoor lido deck", "lift bridge", "lighthouse", "limousine interior", "living room", "lobby",
        "lock chamber", "locker room", "mansion", "manufactured home", "indoor market", "outdoor market", "marsh",
        "martial arts gym", "mausoleum", "medina", "water moat", "outdoor monastery", "indoor mosque",
        "outdoor mosque", "motel", "mountain", "mountain snowy", "indoor movie theater", "indoor museum",
        "music store", "music studio", "outdoor nuclear power plant", "nursery", "oast house", "outdoor observatory",
        "ocean", "office", "office building", "outdoor oil refinery", "oilrig", "operating room", "orchard",
        "outdoor outhouse", "pagoda", "palace", "pantry", "park", "indoor parking garage", "outdoor parking garage",
        "parking lot", "parlor", "pasture", "patio", "pavilion", "pharmacy", "phone booth", "physics laboratory",
        "picnic area", "indoor pilothouse", "outdoor planetarium", "playground", "playroom", "plaza", "indoor podium",
        "outdoor podium", "pond", "establishment poolroom", "home poolroom", "outdoor power plant", "promenade deck",
        "indoor pub", "pulpit", "putting green", "racecourse", "raceway", "raft", "railroad track", "rainforest",
        "reception", "recreation room", "residential neighborhood", "restaurant", "restaurant kitchen",
        "restaurant patio", "rice paddy", "riding arena", "river", "rock arch", "rope bridge", "ruin", "runway",
        "sandbar", "sandbox", "sauna", "schoolhouse", "sea cliff", "server room", "shed", "shoe shop", "shopfront",
        "indoor shopping mall", "shower", "skatepark", "ski lodge", "ski resort", "ski slope", "sky", "skyscraper",
        "slum", "snowfield", "squash court", "stable", "baseball stadium", "football stadium", "indoor stage",
        "staircase", "street", "subway interior", "platform subway station", "supermarket", "sushi bar", "swamp",
        "indoor swimming pool", "outdoor swimming pool", "indoor synagogue", "outdoor synagogue", "television studio",
        "east asia temple", "south asia temple", "indoor tennis court", "outdoor tennis court", "outdoor tent",
        "indoor procenium theater", "indoor seats theater", "thriftshop", "throne room", "ticket booth", "toll plaza",
        "topiary garden", "tower", "toyshop", "outdoor track", "train railway", "platform train station", "tree farm",
        "tree house", "trench", "coral reef underwater", "utility room", "valley", "van interior", "vegetable garden",
        "veranda", "veterinarians office", "viaduct", "videostore", "village", "vineyard", "volcano",
        "indoor volleyball court", "outdoor volleyball court", "waiting room", "indoor warehouse", "water tower",
        "block waterfall", "fan waterfall", "plunge waterfall", "watering hole", "wave", "wet bar", "wheat field",
        "wind farm", "windmill", "barrel storage wine cellar", "bottle storage wine cellar", "indoor wrestling ring",
        "yard", "youth hostel",
    )
    # fmt: on

    def fetch(self) -> None:
        """Let torchvision download it to ``<root>/SUN397``."""
        from torchvision import datasets  # slow to import

        datasets.SUN397(self.root, download=True)

    def list_files(self, at: Path) -> tuple[list[str], NDArray[np.int64], NDArray[np.bool_] | None]:
        """The images in ``Training_01.txt`` and ``Testing_01.txt``, lines of ``/<letter>/<class>/<file>``."""
        known = {name: label for label, name in enumerate(self.class_names)}
        files: list[str] = []
        labels: list[int] = []
        test: list[bool] = []
        for name in ("Training_01.txt", "Testing_01.txt"):
            for line in read_lines(at / name):
                file = PurePosixPath(line.removeprefix("/"))
                label = known.get(" ".join(reversed(file.parent.parts[1:])).replace("_", " "))
                if label is None:
                    raise ConfigurationError(
                        f"{at / name} must have lines of /<letter>/<class>/<file>.jpg of SUN397's classes, got {line!r}"
                    )
                files.append(file.as_posix())
                labels.append(label)
                test.append(name == "Testing_01.txt")
        return files, np.array(labels, dtype=np.int64), np.array(test)
