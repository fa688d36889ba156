from pictures import gigantic, image_folder

from batchnorm.data.image_sources import open_source, small_images_note


def test_an_image_of_gigantic_dimensions_is_passed_over(tmp_path):
    image_folder(tmp_path, [(20, 20)] * 3)
    (tmp_path / "train" / "ant" / "gigantic.png").write_bytes(gigantic())
    note = small_images_note(open_source(tmp_path, "train"), 32)
    assert note == "most images are smaller than 32 px and are enlarged; --size 20 takes them as they are"
