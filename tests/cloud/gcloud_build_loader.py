"""gcloud's own loader of build configurations, as a server on stdin and stdout.

It runs with gcloud's Python and libraries, in a separate process, and imports nothing of this project:

    PYTHONPATH=<sdk>/lib:<sdk>/lib/third_party <sdk>/platform/bundledpythonunix/bin/python3 gcloud_build_loader.py

Each line of stdin is a JSON text: the content of a cloudbuild.yaml. Each line of stdout is a JSON object with
`message`, the body that `gcloud builds submit` sends, or with `error`. For null instead of a text, it is a list of
the fields of gcloud's messages Build, BuildStep and BuildOptions.
"""

import io
import json
import sys


def main():
    from apitools.base.py import encoding
    from googlecloudsdk.api_lib.cloudbuild import cloudbuild_util, config

    messages = cloudbuild_util.GetMessagesModule()
    for line in sys.stdin:
        if json.loads(line) is None:
            parts = {"": messages.Build, "steps.": messages.BuildStep, "options.": messages.BuildOptions}
            print(
                json.dumps([at + field.name for at, part in parts.items() for field in part.all_fields()]), flush=True
            )
            continue
        try:
            build = config.LoadCloudbuildConfigFromStream(
                io.StringIO(json.loads(line)), messages, {}, "cloudbuild.yaml"
            )
            answer = {"message": json.loads(encoding.MessageToJson(build))}
        except Exception as error:  # gcloud ends with an error or a crash: both refuse the file
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
