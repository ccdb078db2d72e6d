# Commands of this project without a GPU: docker build -t fedprompt . && docker run --rm fedprompt table table1
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /project
COPY . .
# Else every container would compile what it imports, which takes three times as long.
RUN UV_COMPILE_BYTECODE=1 make install TORCH=cpu
ENV PATH="/project/.venv/bin:$PATH"
ENTRYPOINT ["benchmark"]
CMD ["--help"]
