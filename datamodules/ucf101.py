"""UCF-101 (Soomro et al., "UCF101: A Dataset of 101 Human Actions Classes from Videos in the Wild", 2012)."""

from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from datamodules.coop_layout import CoOpSource, read_lines


class UCF101(CoOpSource):
    """101 actions, one frame from the middle of each video: 7,639 train and 3,783 test images.

    The test images are those of the official list ``testlist01``. The frames are not part of the data set; CoOp offers
    them.
    """

    title = "UCF-101"
    home = "the link UCF-101-midframes.zip in https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md"
    folders = ("ucf101",)
    images = "UCF-101-midframes"
    layout = "UCF-101-midframes/<Class_Name>/*.jpg"
    split_name = "UCF101"
    sizes = (7639, 3783)
    template = "a photo of a person doing {}."
    # fmt: off
    class_names = (
        "Apply Eye Makeup", "Apply Lipstick", "Archery", "Baby Crawling", "Balance Beam", "Band Marching",
        "Baseball Pitch", "Basketball", "Basketball Dunk", "Bench Press", "Biking", "Billiards", "Blow Dry Hair",
        "Blowing Candles", "Body Weight Squats", "Bowling", "Boxing Punching Bag", "Boxing Speed Bag", "Breast Stroke",
        "Brushing Teeth", "Clean And Jerk", "Cliff Diving", "Cricket Bowling", "Cricket Shot", "Cutting In Kitchen",
        "Diving", "Drumming", "Fencing", "Field Hockey Penalty", "Floor Gymnastics", "Frisbee Catch", "Front Crawl",
        "Golf Swing", "Haircut", "Hammering", "Hammer Throw", "Handstand Pushups", "Handstand Walking", "Head Massage",
        "High Jump", "Horse Race", "Horse Riding", "Hula Hoop", "Ice Dancing", "Javelin Throw", "Juggling Balls",
        "Jumping Jack", "Jump Rope", "Kayaking", "Knitting", "Long Jump", "Lunges", "Military Parade", "Mixing",
        "Mopping Floor", "Nunchucks", "Parallel Bars", "Pizza Tossing", "Playing Cello", "Playing Daf", "Playing Dhol",
        "Playing Flute", "Playing Guitar", "Playing Piano", "Playing Sitar", "Playing Tabla", "Playing Violin",
        "Pole Vault", "Pommel Horse", "Pull Ups", "Punch", "Push Ups", "Rafting", "Rock Climbing Indoor",
        "Rope Climbing", "Rowing", "Salsa Spin", "Shaving Beard", "Shotput", "Skate Boarding", "Skiing", "Skijet",
        "Sky Diving", "Soccer Juggling", "Soccer Penalty", "Still Rings", "Sumo Wrestling", "Surfing", "Swing",
        "Table Tennis Shot", "Tai Chi", "Tennis Swing", "Throw Discus", "Trampoline Jumping", "Typing", "Uneven Bars",
        "Volleyball Spiking", "Walking With Dog", "Wall Pushups", "Writing On Board", "Yo Yo",
    )
    # fmt: on

    def list_files(self, at: Path) -> tuple[list[str], NDArray[np.int64], NDArray[np.bool_] | None]:
        """The frames of the videos in ``ucfTrainTestlist/trainlist01.txt`` and ``testlist01.txt``."""
        known = {name.replace(" ", ""): label for label, name in enumerate(self.class_names)}
        files: list[str] = []
        labels: list[int] = []
        test: list[bool] = []
        for side in ("train", "test"):
            path = at / "ucfTrainTestlist" / f"{side}list01.txt"
            for line in read_lines(path):
                video = PurePosixPath(line.split()[0])
                label = known.get(video.parent.name)
                if label is None:
                    raise ConfigurationError(f"{path} must have lines of <class>/<video>.avi, got {line!r}")
                files.append(f"{self.class_folder(self.class_names[label])}/{video.stem}.jpg")
                labels.append(label)
                test.append(side == "test")
        return files, np.array(labels, dtype=np.int64), np.array(test)
