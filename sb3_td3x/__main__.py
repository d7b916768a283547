from sb3_td3x.cli import main

if __name__ == "__main__":
    main()
